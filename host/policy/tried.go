package policy

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"

	metering "github.com/kvhost/kvhost/host/policy/meter"
)

// trialVersion is raised whenever the canary asks for something else, or the host does what it tries out in another way.
const trialVersion = 1

// trial names all that the canary's verdict follows from: the module, the host that tried it, and the limits it was tried
// under. (Settings it has none.) A file of the cache whose text is not this one to the byte says nothing.
func (m *Module) trial(pages uint32, metered bool) []byte {
	return fmt.Appendf(nil, "kvhost policy tried\nmodule %s\nhost %s trial %d meter %d wazero %s\nroles %v fuel %v pages %d metered %t\n",
		m.digest, hostVersion(), trialVersion, metering.Version, wazeroVersion(), m.roles, m.code.fuel, pages, metered)
}

// hostVersion is that of the running program, as far as it is known.
var hostVersion = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	version := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" || s.Key == "vcs.modified" || s.Key == "GOARCH" {
			version += " " + s.Value
		}
	}
	return version
})

func (c *Cache) trialFile(trial []byte) string {
	h := sha256.Sum256(trial)
	return filepath.Join(c.dir, fmt.Sprintf("%x.tried", h[:16]))
}

// tried says whether this trial was passed before.
func (c *Cache) tried(trial []byte) bool {
	if c == nil || c.dir == "" {
		return false
	}
	b, err := os.ReadFile(c.trialFile(trial))
	return err == nil && bytes.Equal(b, trial)
}

// passed keeps that it was. One that was not passed is held again at each load: whoever mends a module wants to see why.
func (c *Cache) passed(trial []byte, log *slog.Logger) {
	if c == nil || c.dir == "" {
		return
	}
	name := c.trialFile(trial)
	temp, err := os.CreateTemp(c.dir, "*.tmp")
	if err == nil {
		_, err = temp.Write(trial)
		if e := temp.Close(); err == nil {
			err = e
		}
		if err == nil {
			err = os.Rename(temp.Name(), name)
		}
		if err != nil {
			_ = os.Remove(temp.Name())
		}
	}
	if err != nil {
		log.Warn("that a policy was tried out could not be kept", "error", err)
	}
}
