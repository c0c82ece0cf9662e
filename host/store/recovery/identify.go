package recovery

import (
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// Identity is what a piece that a scan meets turned out to be.
type Identity struct {
	Class        *catalog.Class
	FallbackName bool // the file has the built-in name
	Unnamed      bool // nobody gives it the name that it has
	borrowed     bool // Class has a reference that Release gives back
}

// Release gives back what Identify took.
func (i *Identity) Release() {
	if i.borrowed {
		i.Class.Release()
	}
}

// Identify finds who named a piece of a class:
//
//	the path is that of          the piece
//	the class's place policy     is of the class
//	the built-in policy          is of the class, under its built-in name
//	an earlier place policy      is of that policy's class
//	nobody                       is of the class, and must get a name
func Identify(c *catalog.Catalog, cl *catalog.Class, h *pieceformat.Header, rel string) Identity {
	for _, builtin := range [...]bool{false, true} {
		if name, _, err := c.Paths.Path(cl, &h.Key, h.Rank, 0, builtin); err == nil && name == rel {
			return Identity{Class: cl, FallbackName: builtin}
		}
	}
	if earlier := c.ClassAt(cl, h, rel); earlier != nil {
		return Identity{Class: earlier, borrowed: true}
	}
	return Identity{Class: cl, Unnamed: true}
}
