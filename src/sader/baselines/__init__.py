"""Other methods behind one interface.

`baseline` is the interface, `classical` holds the methods without training; the trained systems of the tables are in
`systems`, what several of them share in `parts`.
"""
