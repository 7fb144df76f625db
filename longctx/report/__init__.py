"""The report of a run: its page, pictures, and advice when memory was too little."""
