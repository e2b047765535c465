"""To which example of the batch each row of a layer belongs."""
