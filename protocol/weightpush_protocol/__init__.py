"""What both ends of a weight push agree on: states, errors, messages, manifest, digest and transports.

Imports torch and pydantic; never vLLM or FastAPI. It is all that a third party needs to write another client.
"""

#: Version of the wire contract; a client refuses a server that speaks another major version.
PROTOCOL_VERSION = "1.0"
