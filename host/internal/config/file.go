package config

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// Bounds of reading a configuration file.
const (
	maxFile     = 1 << 20
	readTimeout = 10 * time.Second
)

// applyFile reads a TOML file over l.
func (l *Loaded) applyFile(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	text, err := regular.ReadFile(ctx, name, maxFile)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFile, err)
	}
	return l.applyText(name, string(text))
}

// applyText reads TOML text over l. It reports everything that is wrong, not only the first problem.
func (l *Loaded) applyText(name, text string) error {
	var tree map[string]any
	if _, err := toml.Decode(text, &tree); err != nil {
		var pe toml.ParseError
		if errors.As(err, &pe) {
			// Its own line is the next one where a line ends too early.
			line := 1 + strings.Count(text[:min(pe.Position.Start, len(text))], "\n")
			return fmt.Errorf("%w: %s:%d: %s", ErrFile, name, line, pe.Message)
		}
		return fmt.Errorf("%w: %s: %w", ErrFile, name, err)
	}
	r := fileReader{into: l, name: name, lines: positions(text)}
	r.top(tree)
	return errors.Join(r.errs...)
}

type fileReader struct {
	into  *Loaded
	name  string
	lines map[string]int
	errs  []error
}

func (r *fileReader) origin(path string) string {
	for p := path; p != ""; {
		if n, ok := r.lines[p]; ok {
			return r.name + ":" + strconv.Itoa(n)
		}
		cut := strings.LastIndexAny(p, ".[")
		if cut < 0 {
			break
		}
		p = p[:cut]
	}
	return r.name
}

func (r *fileReader) fail(path string, err error) {
	r.errs = append(r.errs, fmt.Errorf("%s: %w", r.origin(path), err))
}

func (r *fileReader) top(tree map[string]any) {
	for _, name := range sorted(tree) {
		value := tree[name]
		switch {
		case slices.Contains(arrays, name):
			r.array(name, value)
		case slices.Contains(sections(), name):
			table, ok := value.(map[string]any)
			if !ok {
				r.fail(name, fmt.Errorf("%w: %s is %s, want a table [%s]", ErrValue, name, typeName(value), name))
				continue
			}
			for _, key := range sorted(table) {
				if path := name + "." + key; path == pinsPath {
					r.pins(table[key])
				} else {
					r.scalar(path, table[key])
				}
			}
		default:
			r.scalar(name, value)
		}
	}
}

func (r *fileReader) scalar(path string, value any) {
	k, ok := byPath[path]
	if !ok {
		r.fail(path, unknown(path, value))
		return
	}
	text, err := k.fromTOML(value)
	if err == nil {
		err = k.set(&r.into.Config, text)
	}
	if err != nil {
		r.fail(path, err)
		return
	}
	r.into.Origins[path] = Origin{From: FromFile, Where: r.origin(path)}
}

// unknown is the error for a key that does not exist. It suggests the same name in another section, a similar one in
// the same section, or any similar one; for a table, a similar section.
func unknown(path string, value any) error {
	if _, table := value.(map[string]any); table && !strings.Contains(path, ".") {
		return fmt.Errorf("%w: [%s]%s", ErrKey, path, Suggest(path, append(sections(), arrays...)))
	}
	section, name, dotted := strings.Cut(path, ".")
	if !dotted {
		section, name = "", path
	}
	var near, all []string
	hint := ""
	for _, k := range keys {
		all = append(all, k.Path())
		if k.Section == section {
			near = append(near, k.Name)
		}
		if k.Name == name {
			hint = fmt.Sprintf("; did you mean %q?", k.Path())
		}
	}
	if hint == "" {
		hint = Suggest(name, near)
	}
	if hint == "" {
		hint = Suggest(path, all)
	}
	return fmt.Errorf("%w: %s%s", ErrKey, path, hint)
}

// fromTOML checks the type of a TOML value and returns the text that set parses.
func (k *Key) fromTOML(value any) (string, error) {
	switch v := value.(type) {
	case string:
		switch k.Kind {
		case Text, Choice, Size, Duration:
			return v, nil
		}
	case bool:
		if k.Kind == Flag {
			return strconv.FormatBool(v), nil
		}
	case int64:
		if k.Kind == Size || k.Kind == Count || k.Kind == Ratio {
			return strconv.FormatInt(v, 10), nil
		}
	case float64:
		if k.Kind == Ratio {
			return strconv.FormatFloat(v, 'g', -1, 64), nil
		}
	}
	want := k.Kind.String()
	switch k.Kind {
	case Choice:
		want = "one of " + strings.Join(k.Choices, ", ")
	case Size:
		want = "bytes, or text such as \"64KiB\""
	case Duration:
		want = "text such as \"30s\""
	}
	return "", fmt.Errorf("%w: %s is %s, want %s", ErrValue, k.Path(), typeName(value), want)
}

// array reads an array of tables. It replaces the default elements.
func (r *fileReader) array(name string, value any) {
	tables, ok := value.([]map[string]any)
	if list, inline := value.([]any); inline && len(list) == 0 {
		ok = true
	}
	if !ok {
		r.fail(name, fmt.Errorf("%w: %s is %s, want tables [[%s]]", ErrValue, name, typeName(value), name))
		return
	}
	c := &r.into.Config
	switch name {
	case "policy":
		c.Policies = make([]Policy, len(tables))
	case "tenant":
		c.Tenants = make([]Tenant, len(tables))
	case "expiry":
		c.Expiries = make([]Expiry, len(tables))
	case "compression":
		c.Compressions = make([]Compression, len(tables))
	default:
		c.Roots = make([]Root, len(tables))
		for i := range c.Roots {
			c.Roots[i].Capacity, c.Roots[i].Route = defaultCapacity, RouteAuto
		}
	}
	for i, table := range tables {
		path := name + "[" + strconv.Itoa(i) + "]"
		for _, key := range sorted(table) {
			var err error
			switch {
			case name == "root":
				err = c.Roots[i].set(key, table[key])
			case name == "tenant":
				err = c.Tenants[i].set(key, table[key])
			case name == "expiry":
				err = c.Expiries[i].set(key, table[key])
			case name == "compression":
				err = c.Compressions[i].set(key, table[key])
			case key == "config":
				c.Policies[i].Config = r.settings("policy.config", path+".config", table[key])
			default:
				err = c.Policies[i].set(key, table[key])
			}
			if err != nil {
				r.fail(path+"."+key, err)
				continue
			}
			r.into.Origins[path+"."+key] = Origin{From: FromFile, Where: r.origin(path + "." + key)}
		}
		r.into.Origins[path] = Origin{From: FromFile, Where: r.origin(path)}
	}
}

func (p *Policy) set(key string, value any) error {
	var err error
	switch key {
	case "name":
		p.Name, err = asText("policy.name", value)
	case "module":
		p.Module, err = asText("policy.module", value)
	case "levels":
		p.Levels, err = asCounts("policy.levels", value)
	case "namespaces":
		p.Namespaces, err = asTexts("policy.namespaces", value)
	case "shadow":
		p.Shadow, err = asFlag("policy.shadow", value)
	case "capacity":
		p.Capacity, err = asSize("policy.capacity", value)
	case "roles":
		p.Roles, err = asTexts("policy.roles", value)
	case "grants":
		p.Grants, err = asTexts("policy.grants", value)
	case "sha256":
		p.SHA256, err = asText("policy.sha256", value)
	case "public_key":
		p.PublicKey, err = asText("policy.public_key", value)
	case "on_fault":
		p.OnFault, err = asText("policy.on_fault", value)
	case "memory_pages":
		p.MemoryPages, err = asCount("policy.memory_pages", value)
	case "fuel":
		err = p.Fuel.set(value)
	default:
		return fmt.Errorf("%w: policy.%s%s", ErrKey, key, Suggest(key, names(policyKeys)))
	}
	return err
}

func (f *Fuel) set(value any) error {
	table, ok := value.(map[string]any)
	if !ok {
		return fmt.Errorf("%w: policy.fuel is %s, want a table such as {call = 500000, record = 2000}", ErrValue,
			typeName(value))
	}
	for _, key := range sorted(table) {
		var err error
		switch key {
		case "call":
			f.Call, err = asCount("policy.fuel.call", table[key])
		case "record":
			f.Record, err = asCount("policy.fuel.record", table[key])
		case "time":
			f.Time, err = asSpan("policy.fuel.time", table[key])
		default:
			err = fmt.Errorf("%w: policy.fuel.%s%s", ErrKey, key, Suggest(key, []string{"call", "record", "time"}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Root) set(key string, value any) error {
	var err error
	switch key {
	case "path":
		r.Path, err = asText("root.path", value)
	case "capacity":
		var a Amount
		a, err = asAmount("root.capacity", value)
		r.Capacity, r.part = a.Bytes, a.Part
	case "level":
		var n int64
		n, err = asCount("root.level", value)
		r.Level = int(n)
	case "write":
		var text string
		if text, err = asText("root.write", value); err == nil && text != "back" && text != "through" {
			err = fmt.Errorf("%w: root.write is %q, want \"back\" or \"through\"", ErrValue, text)
		}
		r.Through = text == "through"
	case "evict":
		r.Evict, err = asText("root.evict", value)
	case "shared":
		r.Shared, err = asFlag("root.shared", value)
	case "require_mount":
		r.RequireMount, err = asFlag("root.require_mount", value)
	case "route":
		r.Route, err = asText("root.route", value)
	case "min_free":
		r.MinFree, err = asAmount("root.min_free", value)
	case "daily_writes":
		var a Amount
		if a, err = asAmount("root.daily_writes", value); err == nil && a.Part > 0 {
			err = fmt.Errorf("%w: root.daily_writes is a percentage, want bytes, or text such as \"2TiB\"", ErrValue)
		}
		r.DailyWrites = a.Bytes
	default:
		err = fmt.Errorf("%w: root.%s%s", ErrKey, key, Suggest(key, names(rootKeys)))
	}
	return err
}

// settings reads a table of arbitrary keys, such as a policy's own: nested names are joined by dots. Errors call the
// table what.
func (r *fileReader) settings(what, path string, value any) map[string]string {
	table, ok := value.(map[string]any)
	if !ok {
		r.fail(path, fmt.Errorf("%w: %s is %s, want a table", ErrValue, what, typeName(value)))
		return nil
	}
	if len(table) == 0 {
		return nil
	}
	flat := map[string]string{}
	r.flatten(flat, what, path, "", table)
	return flat
}

func (r *fileReader) flatten(dst map[string]string, what, at, prefix string, table map[string]any) {
	for _, key := range sorted(table) {
		at, name := at+"."+key, join(prefix, key)
		text := ""
		switch v := table[key].(type) {
		case string:
			text = v
		case bool:
			text = strconv.FormatBool(v)
		case int64:
			text = strconv.FormatInt(v, 10)
		case float64:
			text = strconv.FormatFloat(v, 'g', -1, 64)
		case map[string]any:
			r.flatten(dst, what, at, name, v)
			continue
		default:
			r.fail(at, fmt.Errorf("%w: %s.%s is %s, want text, a number, true or false", ErrValue, what, name,
				typeName(v)))
			continue
		}
		if _, twice := dst[name]; twice {
			r.fail(at, fmt.Errorf("%w: %s.%s twice", ErrValue, what, name))
		}
		if key == "" || strings.ContainsAny(name, "=\n\r\x00") || strings.ContainsAny(text, "\n\r\x00") {
			r.fail(at, fmt.Errorf("%w: %s.%s: an empty name, a line break, NUL or = in a name", ErrValue, what, name))
		}
		dst[name] = text
	}
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
