"""What operators see of a server: Prometheus series, log lines, spans. All of it follows from the shared record."""
