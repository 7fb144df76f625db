"""What a run says of itself: the page, pictures, and what to add when memory was too little."""
