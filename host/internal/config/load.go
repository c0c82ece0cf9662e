package config

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Source lists the sources of a configuration. Later fields override earlier ones.
type Source struct {
	File  string    // TOML file, or empty
	Env   []string  // in the form of os.Environ
	Flags []Setting // in the order of the command line
}

// Setting is a flag of the command line: --log-level debug is {"log.level", "debug"}. The keys "policy" and "root"
// add one element each; the first one replaces the elements of file and environment.
type Setting struct {
	Key   string
	Value string
}

// From is a kind of source of a value.
type From uint8

const (
	FromDefault From = iota
	FromFile
	FromEnv
	FromFlag
)

func (f From) String() string { return [...]string{"default", "file", "env", "flag"}[f] }

// Origin is the source of a value: file and line, variable, or flag.
type Origin struct {
	From  From
	Where string
}

func (o Origin) String() string {
	if o.Where == "" {
		return o.From.String()
	}
	return o.From.String() + " " + o.Where
}

// Loaded is the effective configuration with the origin of each value.
type Loaded struct {
	Config   Config
	Origins  map[string]Origin // by key path; array elements as "root[0]"; absent means default
	Warnings []string          // about variables that are not settings; an orchestrator, or the setup of another cache, may have set them

	replaced []Policy
}

// Load applies file, environment and flags to the defaults and validates the result.
func Load(src Source) (*Loaded, error) {
	l := &Loaded{Config: *Default(), Origins: map[string]Origin{}}
	var err error
	if src.File != "" {
		if err = l.applyFile(src.File); errors.Is(err, ErrFile) {
			return nil, err
		}
	}
	if err = errors.Join(err, l.applyEnv(src.Env), l.applyFlags(src.Flags)); err != nil {
		return nil, err // without further checks, since a refused value is not set
	}
	for i := range l.Config.Roots {
		// A directory is created by its own name, so a trailing slash is removed. For "./memory:" the rest of the path is kept.
		if path := strings.TrimRight(l.Config.Roots[i].Path, "/"); path != "" && l.Config.Roots[i].Kind() == Directory {
			l.Config.Roots[i].Path = path
		}
	}
	if err := l.measure(); err != nil {
		return nil, err
	}
	return l, l.validate()
}

// EnvName returns the variable that sets a key: KVHOST_LOG_LEVEL for log.level.
func EnvName(path string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// FlagName returns the flag that sets a key, without the dashes: log-level for log.level.
func FlagName(path string) string {
	return strings.NewReplacer(".", "-", "_", "-").Replace(path)
}

const envPrefix = "KVHOST_"

// EnvFile is the variable that names the configuration file if no flag does.
const EnvFile = envPrefix + "CONFIG"

// envProgram is the variable that names the kvhost program for engines that start their own host.
const envProgram = envPrefix + "BIN"

// serviceLink matches the variables that Kubernetes sets in every container for a Service with a name such as kvhost-peers.
var serviceLink = regexp.MustCompile(`^KVHOST_(\w+_)?(PORT=(tcp|udp|sctp)://|` +
	`(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=)`)

func (l *Loaded) applyEnv(environ []string) error {
	byEnv := named(func(k *Key) string { return EnvName(k.Path()) })
	var errs []error
	link, links := "", 0
	for _, pair := range environ {
		name, value, _ := strings.Cut(pair, "=")
		if ours := othersNames[name]; ours != "" && value != "" {
			l.Warnings = append(l.Warnings, fmt.Sprintf("%s is set, and kvhost does not read it: it has %s (host/docs/names.md)", name, ours))
		}
		if !strings.HasPrefix(name, envPrefix) || name == EnvFile || name == envProgram {
			continue
		}
		var err error
		origin := Origin{From: FromEnv, Where: name}
		switch k := byEnv[name]; {
		case name == EnvName("policy"), name == EnvName("root"):
			array := strings.ToLower(strings.TrimPrefix(name, envPrefix))
			l.clear(array)
			for _, element := range strings.Split(value, ",") {
				if element = strings.TrimSpace(element); element != "" {
					err = errors.Join(err, l.add(array, element, origin))
				}
			}
		case k == nil && serviceLink.MatchString(pair):
			if links++; links == 1 {
				link = name
			}
		case k == nil && Gone(name) != "": // an orchestrator would not set it
			err = fmt.Errorf("%w%s", ErrKey, Gone(name))
		case k == nil:
			l.Warnings = append(l.Warnings, fmt.Sprintf("%s is not a setting of kvhost%s", name, Suggest(name, sorted(byEnv))))
		default:
			if err = k.parse(k.field(&l.Config), value); err == nil {
				l.Origins[k.Path()] = origin
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	if links > 0 {
		l.Warnings = append(l.Warnings, fmt.Sprintf("%s and %d more variables are of Kubernetes' Services, and no settings of kvhost: "+
			"enableServiceLinks: false in the pod leaves them out", link, links-1))
	}
	return errors.Join(errs...)
}

func (l *Loaded) applyFlags(settings []Setting) error {
	var errs []error
	cleared := map[string]bool{}
	for _, s := range settings {
		flag := "--" + FlagName(s.Key)
		origin := Origin{From: FromFlag, Where: flag}
		var err error
		switch k := byPath[s.Key]; {
		case s.Key == "policy" || s.Key == "root":
			if !cleared[s.Key] {
				cleared[s.Key] = true
				l.clear(s.Key)
			}
			err = l.add(s.Key, s.Value, origin)
		case k == nil:
			err = unknown(s.Key, nil)
		default:
			if err = k.parse(k.field(&l.Config), s.Value); err == nil {
				l.Origins[s.Key] = origin
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", flag, err))
		}
	}
	return errors.Join(errs...)
}

// clear removes the elements of an array that a stronger source replaces. When the same module is named again, its
// policy's settings in the file are kept: --policy prefix.wasm does not lose [policy.config].
func (l *Loaded) clear(array string) {
	if array == "policy" {
		l.replaced = append(l.replaced, l.Config.Policies...)
		l.Config.Policies = nil
	} else {
		l.Config.Roots = nil
	}
	for path := range l.Origins {
		if strings.HasPrefix(path, array+"[") {
			delete(l.Origins, path)
		}
	}
}

// add appends a policy (a module's path or name) or a root (PATH or PATH=CAPACITY).
func (l *Loaded) add(array, text string, origin Origin) error {
	c := &l.Config
	if array == "policy" {
		p := Policy{Module: text}
		for _, old := range l.replaced {
			if old.Module == text {
				p = old
			}
		}
		at := arrayNamed(array).at(len(c.Policies))
		l.Origins[at], l.Origins[at+".module"] = origin, origin
		c.Policies = append(c.Policies, p)
		return nil
	}
	path, size, given := cutSize(text)
	root, at := arrayNamed(array).fresh.(Root), arrayNamed(array).at(len(c.Roots))
	root.Path = path
	if given {
		a, err := parseAmount(size)
		if err != nil {
			return fmt.Errorf("capacity of %s: %w; a path with = in its last name ends in /, or has its capacity", path, err)
		}
		root.Capacity, root.part = a.Bytes, a.Part
		l.Origins[at+".capacity"] = origin
	}
	l.Origins[at], l.Origins[at+".path"] = origin, origin
	c.Roots = append(c.Roots, root)
	return nil
}

// cutSize splits a root that is given as path=capacity. A path may contain the sign as well, and a capacity has no slash.
func cutSize(text string) (path, size string, given bool) {
	i := strings.LastIndexByte(text, '=')
	if i < 0 || strings.Contains(text[i:], "/") {
		return text, "", false
	}
	return text[:i], text[i+1:], true
}
