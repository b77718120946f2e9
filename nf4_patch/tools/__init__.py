"""The hands: doctor, verify, run, calibrate. Each returns a report object, which cli.py prints."""
