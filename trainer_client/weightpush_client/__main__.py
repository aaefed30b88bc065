"""``python -m weightpush_client``: the same as the ``weightpush`` command."""

from weightpush_client.cli import main

if __name__ == "__main__":
    main()
