package sandbox

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"

	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
)

// selfTestVersion is raised whenever the self-test asks for something else, or the host runs it differently.
const selfTestVersion = 2

// selfTestKey names everything that the result of a self-test depends on: the module, the host that ran it, and the
// limits. It has no settings. A file of the cache must hold exactly this text.
func (c *Code) selfTestKey() []byte {
	return fmt.Appendf(nil, "kvhost policy self-test\nmodule %s\nhost %s self-test %d meter %d wazero %s\n"+
		"roles %v fuel %v pages %d\n", c.digest, hostVersion(), selfTestVersion, metering.Version, wazeroVersion(),
		c.roles, c.limits, c.pages)
}

// hostVersion is the version of the running program, as far as it is known.
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

func (c *Cache) selfTestFile(key []byte) string {
	h := sha256.Sum256(key)
	return filepath.Join(c.dir, fmt.Sprintf("%x.selftest", h[:16]))
}

// SelfTestPassed reports whether the code passed the self-test before.
func (c *Cache) SelfTestPassed(code *Code) bool {
	if c == nil || c.dir == "" {
		return false
	}
	key := code.selfTestKey()
	b, err := os.ReadFile(c.selfTestFile(key))
	return err == nil && bytes.Equal(b, key)
}

// RecordSelfTest records that the code passed the self-test. A failure is not recorded: the author of the module wants
// to see it at each load.
func (c *Cache) RecordSelfTest(code *Code) {
	if c == nil || c.dir == "" {
		return
	}
	key := code.selfTestKey()
	err := writeFile(c.selfTestFile(key), key)
	if err != nil {
		code.log.Warn("cannot record self-test of policy; it will run again", "error", err)
	}
}
