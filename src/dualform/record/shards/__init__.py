"""Complete steps on their way to disk: collected into shards and handed to the writer."""
