"""Files as pixels: images, masks and videos, none of which may be larger than is allowed."""
