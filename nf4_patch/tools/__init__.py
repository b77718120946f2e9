"""The hands: doctor, verify, bench, run, demo. Each returns a report object; cli.py alone prints."""
