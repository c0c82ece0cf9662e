package recovery

import (
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// Identity is what a piece that a scan meets turned out to be.
type Identity struct {
	Class        *catalog.Class
	FallbackName bool   // the file has the built-in name
	Rename       string // the path below the root that the file should have, if that is another one
	borrowed     bool   // Class has a reference that Release gives back
}

// Release gives back what Identify took.
func (i *Identity) Release() {
	if i.borrowed {
		i.Class.Release()
	}
}

// Identify finds who named a piece of a class:
//
//	the path is that of                         the piece
//	the class's place policy                    is of the class
//	the built-in policy                         is of the class, under its built-in name
//	an earlier place policy                     is of that policy's class
//	nobody, and the class's policy has a path   must be renamed to that
//	nobody, and the class's policy has none     must be renamed to the built-in name, as a put would name it
//
// The error is the place policy's when the built-in one has no path either.
func Identify(c *catalog.Catalog, cl *catalog.Class, h *pieceformat.Header, rel string) (Identity, error) {
	placed, _, err := c.Paths.Path(cl, &h.Key, h.Rank, 0, false)
	if err == nil && placed == rel {
		return Identity{Class: cl}, nil
	}
	builtin, _, berr := c.Paths.Path(cl, &h.Key, h.Rank, 0, true)
	if berr == nil && builtin == rel {
		return Identity{Class: cl, FallbackName: true}, nil
	}
	if earlier := c.ClassAt(cl, h, rel); earlier != nil {
		return Identity{Class: earlier, borrowed: true}, nil
	}
	switch {
	case err == nil:
		return Identity{Class: cl, Rename: placed}, nil
	case berr == nil:
		return Identity{Class: cl, Rename: builtin, FallbackName: true}, nil
	}
	return Identity{}, err
}
