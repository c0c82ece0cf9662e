package abi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of a manifest. Its texts appear in logs, metrics and tables.
const (
	MaxManifestBytes = 64 << 10

	maxWord       = 64   // bytes of a name, a version or a unit
	maxSentence   = 1024 // bytes of a description or a default
	maxListed     = 256  // number of counters, and of settings
	manifestDepth = 3    // depth of objects: the manifest, config, and a setting
)

// unambiguous returns an error for JSON that two readers could interpret differently: text that is not UTF-8, a key
// twice in an object, or a key that differs from a field only in case.
func unambiguous(text []byte) error {
	if !utf8.Valid(text) {
		return errors.New("not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	return uniqueKeys(d, nil)
}

// manifestFields returns the keys of the object at a path. It returns nil if the author chooses the keys.
func manifestFields(path []string) []string {
	switch {
	case len(path) == 0:
		return []string{"name", "version", "abi", "description", "roles", "grants", "memory_pages", "fuel", "counters", "config",
			"state_format", "victims_ahead", "min_host"}
	case path[0] == "fuel":
		return []string{"call", "record"}
	case len(path) == 2:
		return []string{"type", "default", "unit", "help"}
	}
	return nil
}

// uniqueKeys checks the keys of the next value. path is the path of keys to that value.
func uniqueKeys(d *json.Decoder, path []string) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	switch t {
	case json.Delim('['):
		for d.More() {
			if err := uniqueKeys(d, append(path, "[]")); err != nil {
				return err
			}
		}
		_, err = d.Token()
		return err
	case json.Delim('{'):
	default:
		return nil
	}
	if len(path) >= manifestDepth {
		return fmt.Errorf("objects in objects in %s", strings.Join(path, "."))
	}
	fields, seen := manifestFields(path), map[string]bool{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		key, _ := t.(string)
		if fields != nil && !slices.Contains(fields, key) {
			return fmt.Errorf("unknown field %.64q (%s)", key, strings.Join(fields, ", "))
		}
		if seen[key] {
			return fmt.Errorf("field %.64q stands there twice", key)
		}
		seen[key] = true
		if err := uniqueKeys(d, append(path, key)); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}

// validateWords checks the texts that people will read, and the names that are used elsewhere.
func (m Manifest) validateWords() error {
	check := func(what, text string, most int, fits func(rune) bool) error {
		if len(text) > most {
			return fmt.Errorf("abi: manifest: %.64q: %s of %d bytes, at most %d", m.Name, what, len(text), most)
		}
		if i := strings.IndexFunc(text, func(r rune) bool { return !fits(r) }); i >= 0 || !utf8.ValidString(text) {
			return fmt.Errorf("abi: manifest: %.64q: %s %.64q has a character that it may not have", m.Name, what, text)
		}
		return nil
	}
	errs := []error{check("a name", m.Name, maxWord, inName), check("a version", m.Version, maxWord, inName),
		check("a description", m.Description, maxSentence, unicode.IsPrint),
		check("a state_format", m.StateFormat, maxWord, func(r rune) bool { return inName(r) || r == '/' }),
		check("a min_host", m.MinHost, maxWord, inName)}
	if len(m.Counters) > maxListed || len(m.Config) > maxListed {
		errs = append(errs, fmt.Errorf("abi: manifest: %.64q: %d counters and %d settings, at most %d of each", m.Name,
			len(m.Counters), len(m.Config), maxListed))
		return errors.Join(errs...)
	}
	seen := map[string]bool{}
	for _, c := range m.Counters {
		if errs = append(errs, check("a counter", c, maxWord, inName)); c == "" || seen[c] {
			errs = append(errs, fmt.Errorf("abi: manifest: %.64q: counter %.64s twice or without a name", m.Name, c))
		}
		seen[c] = true
	}
	for key, o := range m.Config {
		errs = append(errs, check("a setting", key, maxWord, inName), check("a default", o.Default, maxSentence, unicode.IsPrint),
			check("a unit", o.Unit, maxWord, unicode.IsPrint), check("a help", o.Help, maxSentence, unicode.IsPrint))
		if key == "" {
			errs = append(errs, fmt.Errorf("abi: manifest: %.64q: a setting without a name", m.Name))
		}
	}
	return errors.Join(errs...)
}

// inName reports whether a character may be part of a name.
func inName(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._+-", r)
}
