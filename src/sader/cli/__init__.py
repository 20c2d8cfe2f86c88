"""The command line: parse, call one function, print.

One file for each group of commands. Heavy packages are imported inside the commands.
"""
