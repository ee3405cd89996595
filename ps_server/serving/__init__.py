"""What both servers share: a gRPC server from bind to shutdown, its interceptors, limits and metrics."""
