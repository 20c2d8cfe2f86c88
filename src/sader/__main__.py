"""`python -m sader`: the command line."""

from sader.cli.main import main

if __name__ == "__main__":
    main()
