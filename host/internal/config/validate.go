package config

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/spans"
)

// MaxSocketPath is the limit of a sockaddr_un, without the suffix ".fd" of the descriptor socket.
const MaxSocketPath = 107 - len(".fd")

// SocketDir creates a temporary directory for a socket with a name of one letter. The directory is in TMPDIR, unless the path
// would be too long for a socket.
func SocketDir(pattern string) (string, error) {
	dir, err := os.MkdirTemp("", pattern)
	if err != nil || len(dir)+len("/s") <= MaxSocketPath {
		return dir, err
	}
	short, err := os.MkdirTemp("/tmp", pattern)
	return short, errors.Join(err, os.Remove(dir))
}

// Problem is an invalid value, or one that contradicts another.
type Problem struct {
	Path string // path of the key
	Text string
}

func (p *Problem) Error() string { return p.Path + ": " + p.Text }
func (p *Problem) Unwrap() error { return ErrValue }

// Validate reports all errors. Single values were checked when they were set, so it checks how they fit together.
func (c *Config) Validate() error {
	var errs []error
	bad := func(wrong bool, path, format string, args ...any) {
		if wrong {
			errs = append(errs, &Problem{Path: path, Text: fmt.Sprintf(format, args...)})
		}
	}
	switch {
	case c.Socket == "":
		bad(true, "socket", "no path")
	case len(c.Socket) > MaxSocketPath:
		bad(true, "socket", "%d bytes long, but the path of a Unix socket has at most %d", len(c.Socket), MaxSocketPath)
	}
	c.HTTP.validate(bad)
	if _, err := spans.Endpoint(c.OTLP.Endpoint); err != nil && c.OTLP.Endpoint != "" {
		bad(true, "otlp.endpoint", "%v", err)
	}
	bad(c.Engine.SlotBytes%4096 != 0, "engine.slot_bytes", "%d is not a multiple of 4KiB", c.Engine.SlotBytes)
	if m := c.Engine.MaxStagingMemory; m != Auto && m < c.Engine.SlotBytes {
		bad(true, "engine.max_staging_memory", "%s is less than one slot (engine.slot_bytes %s)",
			FormatSize(c.Engine.MaxStagingMemory), FormatSize(c.Engine.SlotBytes))
	}
	c.validateRoots(bad)
	if s := &c.Store; s.SharedLapse < 4*s.SharedPoll {
		bad(true, "store.shared_lapse", "%s, want at least four times shared_poll, %s", s.SharedLapse, 4*s.SharedPoll)
	}
	if id := c.Store.HostID; strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" || len(id) > 32 {
		bad(true, "store.host_id", "%q, want at most 32 of a-z and 0-9", id)
	}
	c.Peers.validate(bad)
	c.validateLimits(bad)
	c.validateCompression(bad)
	c.validatePins(bad)
	c.validatePolicies(bad)
	return errors.Join(errs...)
}

func (c *Config) validateRoots(bad func(wrong bool, path, format string, args ...any)) {
	bad(len(c.Roots) == 0, "root", "no roots: a host needs at least one directory")
	most := maxLevel
	if c.Peers.On() {
		most-- // for the level of other hosts, behind all others
	}
	if m := c.Store.Memory; m > 0 {
		most-- // for the root in memory in front of all others
		bad(m < smallestMemory, "store.memory", "%s, want at least %s, or 0", FormatSize(m), FormatSize(smallestMemory))
		bad(slices.ContainsFunc(c.Roots, Root.takesMemory), "store.memory", "%s, but a root is in memory already", FormatSize(m))
	}
	for i, r := range c.Roots {
		at := "root[" + strconv.Itoa(i) + "]"
		bad(r.Path == "", at+".path", "no path")
		bad(!utf8.ValidString(r.Path), at+".path",
			"%q is not UTF-8, as all names in answers are: give the directory another name, or a link with one", r.Path)
		if name, _, found := strings.Cut(r.Path, ":"); found && r.Kind() == Directory && !strings.Contains(name, "/") {
			bad(true, at+".path", "%q is no kind of root: want memory:, %sbucket/prefix or a directory, which may be written as ./%s", r.Path, s3fs.Scheme, r.Path)
		}
		bad(r.Path == "~" || strings.HasPrefix(r.Path, "~/"), at+".path",
			"%q: only a shell knows the directory ~; write it out, or write ./%s for a directory of that name", r.Path, r.Path)
		bad(strings.HasPrefix(r.Path, "$"), at+".path",
			"%q: only a shell replaces the variable; write the directory out, or write ./%s for one of that name", r.Path, r.Path)
		bad(r.Capacity < smallestRoot, at+".capacity",
			"%d bytes: a root needs at least %s, such as \"100GiB\" or \"80%%\" of its file system", r.Capacity, FormatSize(smallestRoot))
		bad(r.Level < 0 || r.Level > most, at+".level", "%d, want 0 (nearest) to %d", r.Level, most)
		if farther := func(o Root) bool { return o.Level > r.Level }; (r.Write == WriteThrough || r.Write == WriteHits) && !slices.ContainsFunc(c.Roots, farther) {
			bad(true, at+".write", "%s, but no root has a higher level than %d", r.Write, r.Level)
		}
		switch r.Route {
		case RouteAuto, RouteStaged, "":
		case RouteDirect:
			bad(!c.MayUseCuFile(), at+".route", "%q, which gds.max_device_memory or gds.cuda forbids", r.Route)
		default:
			bad(true, at+".route", "%q, want one of %s, %s, %s", r.Route, RouteAuto, RouteDirect, RouteStaged)
		}
		bad(r.MinFree.Bytes < 0 || r.MinFree.Part >= 1, at+".min_free",
			"%s: want bytes, or a part of the file system below 100%%", r.MinFree)
		bad(r.DailyWrites < 0, at+".daily_writes", "%d: want bytes such as \"2TiB\", or 0 for no budget", r.DailyWrites)
		if r.Kind() != Directory {
			r.validateApart(at, bad)
		}
		if r.Kind() != Bucket {
			for _, set := range []struct {
				key string
				is  bool
			}{{"endpoint", r.Endpoint != ""}, {"region", r.Region != ""}, {"path_style", r.PathStyle}, {"ca_file", r.CAFile != ""}} {
				bad(set.is, at+"."+set.key, "%q is no root in a bucket, which has the path s3://bucket/prefix", r.Path)
			}
		}
		for _, o := range c.Roots[:i] {
			switch in, below := r.within(o), o.within(r); {
			case in && below:
				bad(true, at+".path", "%q twice", r.Path)
			case in || below:
				bad(true, at+".path", "%q and %q: one root is inside of the other", o.Path, r.Path)
			}
		}
	}
}

// within reports whether a root is the same as another one or inside it, according to their paths.
func (r Root) within(o Root) bool {
	mine, err := filepath.Abs(r.Path)
	if others, oerr := filepath.Abs(o.Path); err == nil && oerr == nil && r.Path != "" && o.Path != "" && r.Kind() == o.Kind() {
		return mine == others || strings.HasPrefix(mine, strings.TrimSuffix(others, "/")+"/")
	}
	return false
}

// smallestRoot is the smallest capacity of a root: one piece of one page.
const smallestRoot = 8 << 10

// maxLevel is the highest level of a root.
const maxLevel = 7

// smallestMemory is the smallest capacity of a root in memory.
const smallestMemory = 1 << 20

// validateApart refuses settings that have no meaning for a root without a directory.
func (r Root) validateApart(at string, bad func(wrong bool, path, format string, args ...any)) {
	k := r.Kind()
	bad(r.Shared && k.TakesMemory(), at+".shared", "a root in %s is this host's alone", k)
	bad(r.RequireMount, at+".require_mount", "a root in %s has no mount", k)
	bad(r.Route == RouteDirect, at+".route", "%q: cuFile does not reach %s", r.Route, k)
	bad(!r.MinFree.zero(), at+".min_free", "%s: a root in %s has no file system, so lower its capacity instead", r.MinFree, k)
	switch k {
	case Memory:
		r.validateMemory(at, bad)
	case Bucket:
		_, err := s3fs.Open(r.Bucket())
		if key, ok := errors.AsType[*s3fs.ConfigError](err); ok {
			bad(true, at+"."+key.Key, "%s", key.Text)
		}
	}
}

// Bucket returns the configuration of the bucket of a root.
func (r Root) Bucket() s3fs.Config {
	return s3fs.Config{
		Path: r.Path, Endpoint: r.Endpoint, Region: r.Region, PathStyle: r.PathStyle, CAFile: r.CAFile,
		Shared: r.Shared,
	}
}

// validateMemory refuses settings that a root in memory cannot have, because it belongs to this process and ends with it.
func (r Root) validateMemory(at string, bad func(wrong bool, path, format string, args ...any)) {
	name := strings.TrimPrefix(r.Path, MemoryPrefix)
	bad(strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || len(name) > 32, at+".path",
		"%q: want memory: or memory:name, the name of at most 32 of a-z, 0-9, - and _", r.Path)
	bad(r.Capacity > 0 && r.Capacity < smallestMemory, at+".capacity",
		"%s, want at least %s", FormatSize(r.Capacity), FormatSize(smallestMemory))
	bad(r.DailyWrites > 0, at+".daily_writes", "memory does not wear")
}

const publicKeyBytes = 2 + 8 + 32 // algorithm, id, key

func (p *Policy) validate(at string, bad func(wrong bool, path, format string, args ...any)) {
	if p.SHA256 != "" {
		if b, err := hex.DecodeString(p.SHA256); err != nil || len(b) != sha256.Size {
			bad(true, at+".sha256", "%q is not a SHA-256 in hexadecimal", p.SHA256)
		}
	}
	if p.PublicKey != "" {
		block, _ := pem.Decode([]byte(p.PublicKey))
		if b, err := base64.StdEncoding.DecodeString(p.PublicKey); block == nil && (err != nil || len(b) != publicKeyBytes) {
			bad(true, at+".public_key", "%q is not a public key of minisign, nor of cosign: want the line of base64 of the former, not the "+
				"comment nor a path, or the PEM of the latter", p.PublicKey)
		}
	}
	if choices := []string{OnFaultBuiltin, OnFaultStop}; p.OnFault != "" && !slices.Contains(choices, p.OnFault) {
		bad(true, at+".on_fault", "%q: want builtin or stop%s", p.OnFault, Suggest(p.OnFault, choices))
	}
	bad(p.MemoryPages > abi.MaxMemoryPages, at+".memory_pages", "%d, at most %d", p.MemoryPages, abi.MaxMemoryPages)
}

var grants = []string{abi.GrantClock, abi.GrantMetrics, abi.GrantRandom, abi.GrantWASIStub}

func roleNames() []string {
	var names []string
	for r := range abi.Roles {
		names = append(names, r.String())
	}
	return names
}

// validate adds the origin of the value to each problem.
func (l *Loaded) validate() error {
	err := l.Config.Validate()
	if err == nil {
		return nil
	}
	var errs []error
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		where := ""
		if p := (*Problem)(nil); errors.As(e, &p) {
			where = l.where(p.Path)
		}
		if where == "" {
			errs = append(errs, fmt.Errorf("%w: %s", ErrValue, e))
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w: %s", where, ErrValue, e))
	}
	return errors.Join(errs...)
}

// where returns the origin of a key, or of the array element that it belongs to.
func (l *Loaded) where(path string) string {
	if o, ok := l.Origins[path]; ok {
		return o.Where
	}
	for i := len(path) - 1; i > 0; i-- {
		if path[i] == ']' {
			return l.Origins[path[:i+1]].Where
		}
	}
	return ""
}
