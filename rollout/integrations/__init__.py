"""What runs beside a trainer and keeps the service in step with it; none imports its trainer."""
