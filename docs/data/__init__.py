"""What the pages show of data: tables, the example report and its picture.

``make docs-data`` renders all of them again, in place, from the shipped results
and the code; tests hold the pages to the same renderings.
"""
