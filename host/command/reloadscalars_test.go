package command

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// change is a new value of a key, in TOML, and how its effect is seen. A key that needs a restart has no check.
type change struct {
	value string
	also  string // lines of the same section
	check func(h *served, key string)
}

// mode checks the mode of both sockets.
func mode(want os.FileMode) func(*served, string) {
	return func(h *served, key string) {
		for _, name := range []string{"kvhost.sock", "kvhost.sock.fd"} {
			if info, err := os.Stat(filepath.Join(h.dir, name)); err != nil || info.Mode().Perm() != want {
				h.Errorf("%s: want mode %v of %s, got %v and %v", key, want, name, info.Mode(), err)
			}
		}
	}
}

// compiles checks a limit of the process that compiles, which the log has.
func compiles(text string) func(*served, string) {
	return func(h *served, key string) {
		lines := regexp.MustCompile(`(?m)^.*"compiling policy".*$`).FindAllString(h.logged(), -1)
		if len(lines) == 0 || !strings.Contains(lines[len(lines)-1], text) {
			h.Errorf("%s: no policy was compiled with %s: %q", key, text, lines)
		}
	}
}

const anyPolicy = "[[policy]]\nmodule = \"lru\"\n"

// scalars are the keys that a reload changes.
var scalars = map[string]change{
	"policy_dir": {value: `"modules"`, also: "", check: func(h *served, key string) {
		if p := h.acting("special"); p == nil {
			h.Errorf("%s: the policies are %v", key, h.status().Policies)
		}
	}},
	"policy_memory": {value: `"512MiB"`, check: func(h *served, key string) {
		if got := h.status().PolicyMemoryLimit; got != 512<<20 {
			h.Errorf("%s is %d", key, got)
		}
	}},
	"policy_compile.memory": {value: `"1GiB"`, check: compiles(`"memory":1073741824`)},
	"policy_compile.cpu":    {value: `"59s"`, check: compiles(`"cpu":"59s"`)},
	"policy_compile.time":   {value: `"4m"`, check: compiles(`"time":"4m0s"`)},
	"log.level": {value: `"debug"`, check: func(h *served, key string) {
		before := len(h.logged())
		h.signal(syscall.SIGUSR2) // from debug it goes to info
		h.until("switch of the level", func() bool { return strings.Contains(h.logged()[before:], "log level switched") })
		if text := h.logged()[before:]; !strings.Contains(text, `"to":"INFO"`) {
			h.Errorf("%s was not debug: %s", key, text)
		}
	}},
}
