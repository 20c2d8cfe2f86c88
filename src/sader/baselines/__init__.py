"""Other methods of cloud removal behind one interface.

`baseline` is the interface, `classical` holds the methods without training. The trained systems of the paper's tables
are in `systems`; network parts that several of them share are in `parts`.
"""
