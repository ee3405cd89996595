"""ps-run over several hosts: what is decided, the program on a host, and jobs over a real sshd on loopback."""
