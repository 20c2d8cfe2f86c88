"""Network parts that several baseline systems share.

A part that only one system uses belongs in that system's file.
"""
