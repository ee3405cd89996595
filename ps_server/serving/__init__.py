"""What both servers share: a gRPC server from bind to shutdown, errors as statuses, malformed requests refused."""
