package doctor

import "github.com/kvhost/kvhost/host/internal/config"

// judgeCompression says where compression is asked for in vain.
func (r *Report) judgeCompression(c *config.Config) {
	if !c.Compresses(config.Root{}) {
		return
	}
	some := false
	for _, root := range c.Roots {
		if c.Compresses(root) {
			some = true
		} else {
			r.find(Note, "root "+root.Path, "", "shared roots are never compressed")
		}
	}
	if !some {
		r.find(Warning, "compression", `compression = "off", or a root in a directory that no other host shares`,
			"no root may hold compressed chunks")
	}
}
