"""``python -m factory`` is the ``factory`` command."""

from factory.cli import main

if __name__ == "__main__":
    main()
