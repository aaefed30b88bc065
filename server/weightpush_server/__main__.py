"""``python -m weightpush_server ARGUMENTS``: the server's first process, as the supervisor starts it."""

import sys

from weightpush_server.app import main

if __name__ == "__main__":
    main(sys.argv[1:])
