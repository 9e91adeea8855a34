"""The plugins that come with engage; each is found through an entry point, as a third party's is."""
