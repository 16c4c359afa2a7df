"""The live page: what the gateway does at this moment, for a person with a browser."""
