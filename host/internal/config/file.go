package config

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
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

// applyFile sets the keys that a TOML file contains.
func (l *Loaded) applyFile(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	text, err := regular.ReadFile(ctx, name, maxFile)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFile, err)
	}
	return l.applyText(name, string(text))
}

// applyText sets the keys that TOML text contains. It reports all errors, not only the first one.
func (l *Loaded) applyText(name, text string) error {
	var tree map[string]any
	if _, err := toml.Decode(text, &tree); err != nil {
		if pe, ok := errors.AsType[toml.ParseError](err); ok {
			// If a line ends too early, the parser reports the next line.
			line := 1 + strings.Count(text[:min(max(0, pe.Position.Start), len(text))], "\n")
			return fmt.Errorf("%w: %s:%d: %s", ErrFile, name, line, pe.Message)
		}
		return fmt.Errorf("%w: %s: %w", ErrFile, name, err)
	}
	r := fileReader{into: l, name: name, lines: linesOf(text)}
	r.top(tree)
	return errors.Join(r.errs...)
}

type fileReader struct {
	into  *Loaded
	name  string
	lines map[string]int
	errs  []error
}

// origin returns the line of a path, or of the nearest table around it.
func (r *fileReader) origin(path string) Origin {
	for path != "" && r.lines[path] == 0 {
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
	if path == "" {
		return Origin{From: FromFile, Where: r.name}
	}
	return Origin{From: FromFile, Where: r.name + ":" + strconv.Itoa(r.lines[path])}
}

func (r *fileReader) fail(path string, err error) {
	r.errs = append(r.errs, fmt.Errorf("%s: %w", r.origin(path).Where, err))
}

func (r *fileReader) top(tree map[string]any) {
	for _, name := range sorted(tree) {
		value := tree[name]
		switch {
		case arrayNamed(name) != nil:
			r.array(arrayNamed(name), value)
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
	if err := k.set(k.field(&r.into.Config), value); err != nil {
		r.fail(path, err)
		return
	}
	r.into.Origins[path] = r.origin(path)
}

// unknown returns the error for a key that does not exist. It suggests the same name in another section, a similar name
// in the same section, or any similar name. For a table it suggests a similar section.
func unknown(path string, value any) error {
	if _, table := value.(map[string]any); table && Gone(path) == "" && !strings.Contains(path, ".") {
		names := sections()
		for _, a := range arrays {
			names = append(names, a.name)
		}
		return fmt.Errorf("%w: [%s]%s", ErrKey, path, Suggest(path, names))
	}
	if why := Gone(path); why != "" {
		return fmt.Errorf("%w: %s%s", ErrKey, path, why)
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
		if k.Name == name && hint == "" {
			hint = fmt.Sprintf("; did you mean %q?", k.Path())
		}
	}
	return fmt.Errorf("%w: %s%s", ErrKey, path, cmp.Or(hint, Suggest(name, near), Suggest(path, all)))
}

// array reads tables, which replace the default elements.
func (r *fileReader) array(a *array, value any) {
	elements, ok := value.([]map[string]any)
	if list, inline := value.([]any); inline && len(list) == 0 {
		ok = true
	}
	if !ok {
		r.fail(a.name, fmt.Errorf("%w: %s is %s, want tables [[%s]]", ErrValue, a.name, typeName(value), a.name))
		return
	}
	list := a.list(&r.into.Config)
	list.SetZero()
	for i, table := range elements {
		list.Set(reflect.Append(list, reflect.ValueOf(a.fresh)))
		element := list.Index(i).Addr().Interface()
		for _, name := range sorted(table) {
			at := a.at(i) + "." + name
			if err := a.set(element, name, table[name]); err != nil {
				r.fail(at, err)
				continue
			}
			r.into.Origins[at] = r.origin(at)
		}
		r.into.Origins[a.at(i)] = r.origin(a.at(i))
	}
}

// set sets a key of an element.
func (a *array) set(element any, name string, value any) error {
	k := keyNamed(a.keys, name)
	if k == nil {
		return fmt.Errorf("%w: %s.%s%s", ErrKey, a.name, name, cmp.Or(Gone(a.name+"."+name), Suggest(name, namesOf(a.keys))))
	}
	if root, is := element.(*Root); is && name == "capacity" {
		var c Amount
		err := c.set(k.Path(), value)
		root.Capacity, root.part = c.Bytes, c.Part
		return err
	}
	return k.set(k.field(element), value)
}

// list returns the array's value in a configuration.
func (a *array) list(c *Config) reflect.Value { return reflect.ValueOf(c).Elem().FieldByIndex(a.index) }

// at returns the path of an element.
func (a *array) at(i int) string { return a.name + "[" + strconv.Itoa(i) + "]" }

// asSettings reads a table of arbitrary keys, such as the settings of a policy. Names of nested tables are joined by dots.
func asSettings(path string, value any) (map[string]string, error) {
	table, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%w: %s is %s, want a table", ErrValue, path, typeName(value))
	}
	if len(table) == 0 {
		return nil, nil
	}
	flat := map[string]string{}
	return flat, flatten(flat, path, "", table)
}

func flatten(dst map[string]string, path, prefix string, table map[string]any) error {
	for _, key := range sorted(table) {
		name, text := prefix+key, ""
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
			if err := flatten(dst, path, name+".", v); err != nil {
				return err
			}
			continue
		default:
			return fmt.Errorf("%w: %s.%s is %s, want text, a number, true or false", ErrValue, path, name, typeName(v))
		}
		if _, twice := dst[name]; twice {
			return fmt.Errorf("%w: %s.%s twice", ErrValue, path, name)
		}
		if key == "" || strings.ContainsAny(name, "=\n\r\x00") || strings.ContainsAny(text, "\n\r\x00") {
			return fmt.Errorf("%w: %s.%s: an empty name, a line break, NUL or = in a name", ErrValue, path, name)
		}
		dst[name] = text
	}
	return nil
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
