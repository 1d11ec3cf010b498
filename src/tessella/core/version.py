"""The version, for plans, pages and the package itself."""

VERSION = "0.1.0"
