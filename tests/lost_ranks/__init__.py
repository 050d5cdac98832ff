"""Jobs that lose a rank: how a rank is lost (death), the job around it (job), and what the
survivors may say (verdict)."""
