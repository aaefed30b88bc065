"""What both ends of a weight push agree on: states, errors, messages, manifest, digest and transports.

Imports torch and pydantic; never vLLM or FastAPI. It is all that a third party needs to write another client.
"""

#: Version of the wire contract. A server must speak the client's major version, and at least its minor one; see
#: `weightpush_protocol.versions`.
PROTOCOL_VERSION = "1.1"
