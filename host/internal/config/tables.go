package config

import (
	"bufio"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Field is a key of an array table.
type Field struct {
	Name   string
	Reload bool // as of Key
}

// table is a kind of array table.
type table interface {
	name() string
	fields() []Field
	read(r *fileReader, elements []map[string]any)
	print(b *bufio.Writer, l *Loaded)
}

// tables are all kinds, in the order of the example file.
var tables = []table{policies, roots, tenants, expiries, compressions}

func tableNamed(name string) table {
	for _, t := range tables {
		if t.name() == name {
			return t
		}
	}
	return nil
}

// tableOf is a kind of array table with elements of type E.
type tableOf[E any] struct {
	array string
	list  func(*Config) *[]E
	fresh E // an element before its keys are read
	keys  []tableKey[E]
}

// tableKey is one row of such a table: how a key is read and printed.
type tableKey[E any] struct {
	Field
	set  func(e *E, path string, value any) error
	text func(e *E) string // its TOML; empty: it is left out
}

var policies = tableOf[Policy]{"policy", func(c *Config) *[]Policy { return &c.Policies }, Policy{}, []tableKey[Policy]{
	{Field{"name", true}, by(asText, func(p *Policy) *string { return &p.Name }),
		func(p *Policy) string { return quoteSome(p.Name) }},
	{Field{"module", true}, by(asText, func(p *Policy) *string { return &p.Module }),
		func(p *Policy) string { return quote(p.Module) }},
	{Field{"namespaces", true}, by(asTexts, func(p *Policy) *[]string { return &p.Namespaces }),
		func(p *Policy) string { return quoteAll(p.Namespaces) }},
	{Field{"levels", true}, by(asCounts, func(p *Policy) *[]int { return &p.Levels }),
		func(p *Policy) string { return numbers(p.Levels) }},
	{Field{"shadow", true}, by(asFlag, func(p *Policy) *bool { return &p.Shadow }),
		func(p *Policy) string { return onlyTrue(p.Shadow) }},
	{Field{"capacity", true}, by(asSize, func(p *Policy) *int64 { return &p.Capacity }),
		func(p *Policy) string { return sizeTOML(p.Capacity) }},
	{Field{"roles", true}, by(asTexts, func(p *Policy) *[]string { return &p.Roles }),
		func(p *Policy) string { return quoteAll(p.Roles) }},
	{Field{"grants", true}, by(asTexts, func(p *Policy) *[]string { return &p.Grants }),
		func(p *Policy) string { return quoteAll(p.Grants) }},
	{Field{"sha256", true}, by(asText, func(p *Policy) *string { return &p.SHA256 }),
		func(p *Policy) string { return quoteSome(p.SHA256) }},
	{Field{"public_key", true}, by(asText, func(p *Policy) *string { return &p.PublicKey }),
		func(p *Policy) string { return quoteSome(p.PublicKey) }},
	{Field{"on_fault", true}, by(asText, func(p *Policy) *string { return &p.OnFault }),
		func(p *Policy) string { return quoteSome(p.OnFault) }},
	{Field{"memory_pages", true}, by(asCount, func(p *Policy) *int64 { return &p.MemoryPages }),
		func(p *Policy) string { return strconv.FormatInt(p.MemoryPages, 10) }},
	{Field{"fuel", true}, func(p *Policy, _ string, value any) error { return p.Fuel.set(value) },
		func(p *Policy) string {
			return fmt.Sprintf("{call = %d, record = %d, time = %q}", p.Fuel.Call, p.Fuel.Record, p.Fuel.Time)
		}},
	{Field{"config", true}, by(asSettings, func(p *Policy) *map[string]string { return &p.Config }),
		func(p *Policy) string { return settingsTOML(p.Config) }},
}}

var roots = tableOf[Root]{"root", func(c *Config) *[]Root { return &c.Roots },
	Root{Capacity: defaultCapacity, Route: RouteAuto}, []tableKey[Root]{
		{Field{"path", false}, by(asText, func(r *Root) *string { return &r.Path }),
			func(r *Root) string { return quote(r.Path) }},
		{Field{"level", false}, by(asInt, func(r *Root) *int { return &r.Level }),
			func(r *Root) string { return strconv.Itoa(r.Level) }},
		{Field{"write", false}, (*Root).setWrite,
			func(r *Root) string { return quote(map[bool]string{false: "back", true: "through"}[r.Through]) }},
		{Field{"shared", false}, by(asFlag, func(r *Root) *bool { return &r.Shared }),
			func(r *Root) string { return strconv.FormatBool(r.Shared) }},
		{Field{"require_mount", false}, by(asFlag, func(r *Root) *bool { return &r.RequireMount }),
			func(r *Root) string { return strconv.FormatBool(r.RequireMount) }},
		{Field{"route", false}, by(asText, func(r *Root) *string { return &r.Route }),
			func(r *Root) string { return quote(r.Route) }},
		{Field{"capacity", true}, (*Root).setCapacity,
			func(r *Root) string { return sizeTOML(r.Capacity) }},
		{Field{"evict", true}, by(asText, func(r *Root) *string { return &r.Evict }),
			func(r *Root) string { return quote(r.Evict) }},
		{Field{"min_free", true}, by(asAmount, func(r *Root) *Amount { return &r.MinFree }),
			func(r *Root) string { return r.MinFree.toml() }},
		{Field{"daily_writes", true}, (*Root).setDailyWrites,
			func(r *Root) string { return sizeTOML(r.DailyWrites) }},
	}}

var tenants = tableOf[Tenant]{"tenant", func(c *Config) *[]Tenant { return &c.Tenants }, Tenant{}, []tableKey[Tenant]{
	{Field{"id", true}, (*Tenant).setID, func(t *Tenant) string { return quote(t.ID()) }},
	{Field{"quota", true}, by(asAmount, func(t *Tenant) *Amount { return &t.Quota }),
		func(t *Tenant) string { return t.Quota.toml() }},
	{Field{"uids", true}, by(asIDs, func(t *Tenant) *[]uint32 { return &t.UIDs }),
		func(t *Tenant) string { return numbers(t.UIDs) }},
	{Field{"private", true}, by(asFlag, func(t *Tenant) *bool { return &t.Private }),
		func(t *Tenant) string { return onlyTrue(t.Private) }},
	{Field{"sessions", true}, by(asInt, func(t *Tenant) *int { return &t.Sessions }),
		func(t *Tenant) string { return strconv.Itoa(t.Sessions) }},
}}

var expiries = tableOf[Expiry]{"expiry", func(c *Config) *[]Expiry { return &c.Expiries }, Expiry{}, []tableKey[Expiry]{
	{Field{"model", false}, by(asText, func(e *Expiry) *string { return &e.Model }),
		func(e *Expiry) string { return quote(e.Model) }},
	{Field{"ttl", false}, by(asSpan, func(e *Expiry) *time.Duration { return &e.TTL }),
		func(e *Expiry) string { return quote(e.TTL.String()) }},
}}

var compressions = tableOf[Compression]{"compression", func(c *Config) *[]Compression { return &c.Compressions }, Compression{},
	[]tableKey[Compression]{
		{Field{"namespaces", false}, by(asTexts, func(m *Compression) *[]string { return &m.Namespaces }),
			func(m *Compression) string { return quoteAll(m.Namespaces) }},
		{Field{"mode", false}, by(asText, func(m *Compression) *string { return &m.Mode }),
			func(m *Compression) string { return quote(m.Mode) }},
	}}

// by sets the field of an element to a value that a function reads.
func by[E, V any](read func(path string, value any) (V, error), field func(*E) *V) func(*E, string, any) error {
	return func(e *E, path string, value any) (err error) {
		*field(e), err = read(path, value)
		return err
	}
}

func (t tableOf[E]) name() string { return t.array }

func (t tableOf[E]) fields() (list []Field) {
	for _, k := range t.keys {
		list = append(list, k.Field)
	}
	return list
}

// at is the path of an element.
func (t tableOf[E]) at(i int) string { return t.array + "[" + strconv.Itoa(i) + "]" }

// read replaces the default elements.
func (t tableOf[E]) read(r *fileReader, elements []map[string]any) {
	list := make([]E, len(elements))
	for i, element := range elements {
		list[i] = t.fresh
		for _, key := range sorted(element) {
			if err := t.set(&list[i], key, element[key]); err != nil {
				r.fail(err)
				continue
			}
			r.into.Origins[t.at(i)+"."+key] = r.origin
		}
		r.into.Origins[t.at(i)] = r.origin
	}
	*t.list(&r.into.Config) = list
}

func (t tableOf[E]) set(e *E, key string, value any) error {
	for _, k := range t.keys {
		if k.Name == key {
			return k.set(e, t.array+"."+key, value)
		}
	}
	return fmt.Errorf("%w: %s.%s%s", ErrKey, t.array, key, Suggest(key, names(t.fields())))
}

// print writes the elements as TOML with the origin of each value.
func (t tableOf[E]) print(b *bufio.Writer, l *Loaded) {
	for i := range *t.list(&l.Config) {
		e := &(*t.list(&l.Config))[i]
		fmt.Fprintf(b, "\n[[%s]] # %s\n", t.array, l.Origins[t.at(i)])
		for _, k := range t.keys {
			if text := k.text(e); text != "" {
				fmt.Fprintf(b, "%s = %s # %s\n", k.Name, text, l.Origins[t.at(i)+"."+k.Name])
			}
		}
	}
}

// changes are the keys that two configurations have different values of. Elements come and go with a restart.
func (t tableOf[E]) changes(old, next *Config, add func(key string, reload bool)) {
	a, b := *t.list(old), *t.list(next)
	for i := range max(len(a), len(b)) {
		if i >= min(len(a), len(b)) {
			add(t.at(i), false)
			continue
		}
		for _, k := range t.keys {
			if k.text(&a[i]) != k.text(&b[i]) {
				add(t.at(i)+"."+k.Name, k.Reload)
			}
		}
	}
}

// differ says whether anything in two configurations' elements is different.
func (t tableOf[E]) differ(old, next *Config) bool {
	return !reflect.DeepEqual(*t.list(old), *t.list(next))
}

// names of fields, for suggestions.
func names(list []Field) (out []string) {
	for _, f := range list {
		out = append(out, f.Name)
	}
	return out
}

func arrayNames() (list []string) {
	for _, t := range tables {
		list = append(list, t.name())
	}
	return list
}

func quoteSome(s string) string {
	if s == "" {
		return ""
	}
	return quote(s)
}

func onlyTrue(b bool) string {
	if b {
		return "true"
	}
	return ""
}

func quoteAll(list []string) string {
	if len(list) == 0 {
		return ""
	}
	quoted := make([]string, len(list))
	for i, s := range list {
		quoted[i] = quote(s)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

func numbers[N int | uint32](list []N) string {
	if list == nil {
		return ""
	}
	return strings.ReplaceAll(fmt.Sprint(list), " ", ", ")
}

func settingsTOML(m map[string]string) string {
	var list []string
	for _, key := range sorted(m) {
		list = append(list, quote(key)+" = "+quote(m[key]))
	}
	if len(list) == 0 {
		return ""
	}
	return "{" + strings.Join(list, ", ") + "}"
}

func sizeTOML(n int64) string {
	text := FormatSize(n)
	if strings.Trim(text, "0123456789") == "" {
		return text
	}
	return quote(text)
}
