"""Many runs: their jobs, the processes and machines that execute them, and which of them are done."""
