"""Starts Dynamo's side of the index benchmark under an interpreter that has Dynamo.

Run as a file: that puts this folder first on the module path, so that `index_kit` is found without this package.
"""

import importlib

if __name__ == "__main__":
    importlib.import_module("index_kit.dynamo").main()
