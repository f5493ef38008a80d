"""The only package that imports Ray: Serve deployments, handles, routing, deployment files."""
