package config

import (
	_ "embed" // kvhost.toml
	"reflect"
	"slices"
	"strings"
	"time"
)

// Kind is the type of a key's value.
type Kind string

const (
	Text     Kind = "text"
	Choice   Kind = "choice" // one of the words in Key.Choices
	Size     Kind = "size"   // bytes
	Duration Kind = "duration"
	Count    Kind = "whole number"
	Ratio    Kind = "ratio" // 0 to 1
	Flag     Kind = "true or false"
)

// Key is a setting: a field of [Config], or of an element of one of its arrays. The field's type and tags determine all
// properties of the key except its default and its meaning, which are in kvhost.toml.
//
//	toml:"NAME"         name in the file; with ,omitempty an empty value is not printed
//	is:"size"           an int64 is a number of bytes
//	one:"WORD WORD"     the allowed words
//	zero:"WORD"         the word for no value
//	auto:"yes"          a size that may be auto, which is kept as [Auto]
//	min:"N" max:"N"     limits of a size, a count or a duration; without min the least is 0
//	reload:"yes"        SIGHUP changes the value; else a restart is needed. Elements of an array come and go, too
type Key struct {
	Section  string // "" for the top level; the name of the array for the keys of its elements
	Name     string
	Kind     Kind // for a list, the kind of its elements
	Choices  []string
	Min, Max int64 // limits of a Size, Count or Duration (nanoseconds); a Max of 0 means none
	Reload   bool
	Default  string // default as it would be written in the environment
	Help     string // text in kvhost.toml without the default

	array     bool // the key is a list
	omitEmpty bool
	auto      bool
	zero      string
	index     []int // index of the field in Config, or in an element
	inner     []*Key
}

// Path returns the full name of the key: section.name.
func (k *Key) Path() string { return strings.TrimPrefix(k.Section+"."+k.Name, ".") }

// field returns the key's field in a configuration or an element, given a pointer to it.
func (k *Key) field(of any) reflect.Value { return reflect.ValueOf(of).Elem().FieldByIndex(k.index) }

// array is an array of tables.
type array struct {
	name   string
	reload bool
	keys   []*Key
	index  []int
	fresh  any // an element before its keys are read
}

// Keys returns the scalar keys in the order of the example file. The caller must not change the slice.
func Keys() []*Key { return keys }

var (
	keys, arrays = keysOf(reflect.TypeFor[Config](), "", nil)
	byPath       = named((*Key).Path)
)

func init() {
	c := Default()
	for _, k := range keys {
		k.Default = k.text(k.field(c))
	}
	root := c.Roots[0]
	root.Path = ""
	arrayNamed("root").fresh = root
}

// keysOf walks a struct. A struct inside it is a section, and a list of structs is an array of tables.
func keysOf(t reflect.Type, section string, at []int) (list []*Key, tables []*array) {
	for f := range t.Fields() {
		name, omit, _ := strings.Cut(f.Tag.Get("toml"), ",")
		if name == "" {
			continue
		}
		index := append(at[:len(at):len(at)], f.Index...)
		reload := f.Tag.Get("reload") != ""
		_, reads := reflect.New(f.Type).Interface().(value)
		switch {
		case f.Type.Kind() == reflect.Struct && !reads && section == "":
			inner, _ := keysOf(f.Type, name, index)
			list = append(list, inner...)
			continue
		case f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct:
			elements, _ := keysOf(f.Type.Elem(), name, nil)
			for _, k := range elements {
				k.array, k.Reload = true, k.Reload || reload
			}
			tables = append(tables, &array{name: name, reload: reload, keys: elements, index: index, fresh: reflect.Zero(f.Type.Elem()).Interface()})
			continue
		}
		k := &Key{Section: section, Name: name, Kind: kindOf(f.Type, f.Tag), Choices: strings.Fields(f.Tag.Get("one")), Reload: reload,
			omitEmpty: omit != "", auto: f.Tag.Get("auto") != "", zero: f.Tag.Get("zero"), index: index}
		if f.Type.Kind() == reflect.Struct && !reads {
			k.inner, _ = keysOf(f.Type, section+"."+name, nil)
		}
		k.Min, k.Max = k.limit(f.Tag.Get("min")), k.limit(f.Tag.Get("max"))
		k.Help, _, _ = strings.Cut(comments[k.Path()], " Default: ")
		list = append(list, k)
	}
	return list, tables
}

func kindOf(t reflect.Type, tag reflect.StructTag) Kind {
	switch {
	case tag.Get("one") != "":
		return Choice
	case tag.Get("is") == "size":
		return Size
	case t == reflect.TypeFor[time.Duration]():
		return Duration
	}
	switch t.Kind() {
	case reflect.Slice:
		return kindOf(t.Elem(), tag)
	case reflect.Bool:
		return Flag
	case reflect.Float64:
		return Ratio
	case reflect.Int, reflect.Int64, reflect.Uint32:
		return Count
	}
	return Text
}

// limit reads the tag of a limit.
func (k *Key) limit(text string) int64 {
	if text == "" {
		return 0
	}
	n, err := k.number(text)
	if err != nil {
		panic("config: the limit of " + k.Path() + ": " + err.Error())
	}
	return n
}

func arrayNamed(name string) *array {
	if i := slices.IndexFunc(arrays, func(a *array) bool { return a.name == name }); i >= 0 {
		return arrays[i]
	}
	return nil
}

func keyNamed(list []*Key, name string) *Key {
	if i := slices.IndexFunc(list, func(k *Key) bool { return k.Name == name }); i >= 0 {
		return list[i]
	}
	return nil
}

// sections returns the tables of scalar keys in order.
func sections() (list []string) {
	for _, k := range keys {
		if k.Section != "" && (len(list) == 0 || list[len(list)-1] != k.Section) {
			list = append(list, k.Section)
		}
	}
	return list
}

// named returns the scalar keys by a name.
func named(name func(*Key) string) map[string]*Key {
	m := make(map[string]*Key, len(keys))
	for _, k := range keys {
		m[name(k)] = k
	}
	return m
}

func namesOf(list []*Key) (out []string) {
	for _, k := range list {
		out = append(out, k.Name)
	}
	return out
}

// example is the commented file of all keys, each at its default.
//
//go:embed kvhost.toml
var example string

// comments holds the comments of the scalar keys in the example file, by path.
var comments = func() map[string]string {
	m, section, comment := map[string]string{}, "", ""
	for line := range strings.Lines(example) {
		line = strings.TrimSpace(line)
		name, _, isKey := strings.Cut(line, " = ")
		switch text, isComment := strings.CutPrefix(line, "# "); {
		case strings.HasPrefix(line, "[["):
			return m
		case isComment:
			comment += " " + text
			continue
		case strings.HasPrefix(line, "["):
			section = strings.Trim(line, "[]") + "."
		case isKey:
			m[section+name] = strings.TrimSpace(comment)
		}
		comment = ""
	}
	return m
}()
