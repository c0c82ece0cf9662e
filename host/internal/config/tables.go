package config

import (
	"bufio"
	"cmp"
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

// kind is how values of a type are read and printed.
type kind[V any] struct {
	read func(path string, value any) (V, error)
	text func(V) string
}

var (
	text      = kind[string]{asText, quote}
	textIfAny = kind[string]{asText, quoteSome}
	texts     = kind[[]string]{asList("text", asText), quoteAll}
	onOff     = kind[bool]{asFlag, strconv.FormatBool}
	ifOn      = kind[bool]{asFlag, onlyTrue}
	whole     = kind[int]{asInt, strconv.Itoa}
	amount    = kind[Amount]{asAmount, Amount.toml}
)

// by is a row for a field of an element.
func by[E, V any](name string, reload bool, k kind[V], field func(*E) *V) tableKey[E] {
	return tableKey[E]{Field{name, reload}, func(e *E, path string, value any) (err error) {
		*field(e), err = k.read(path, value)
		return err
	}, func(e *E) string { return k.text(*field(e)) }}
}

var policies = tableOf[Policy]{"policy", func(c *Config) *[]Policy { return &c.Policies }, Policy{}, []tableKey[Policy]{
	by("name", true, textIfAny, func(p *Policy) *string { return &p.Name }),
	by("module", true, text, func(p *Policy) *string { return &p.Module }),
	by("namespaces", true, texts, func(p *Policy) *[]string { return &p.Namespaces }),
	by("levels", true, kind[[]int]{asList("whole numbers", asInt), numbers[int]}, func(p *Policy) *[]int { return &p.Levels }),
	by("shadow", true, ifOn, func(p *Policy) *bool { return &p.Shadow }),
	by("capacity", true, kind[int64]{asSize, sizeTOML}, func(p *Policy) *int64 { return &p.Capacity }),
	by("roles", true, texts, func(p *Policy) *[]string { return &p.Roles }),
	by("grants", true, texts, func(p *Policy) *[]string { return &p.Grants }),
	by("sha256", true, textIfAny, func(p *Policy) *string { return &p.SHA256 }),
	by("public_key", true, textIfAny, func(p *Policy) *string { return &p.PublicKey }),
	by("on_fault", true, textIfAny, func(p *Policy) *string { return &p.OnFault }),
	by("memory_pages", true, kind[int64]{asCount, func(n int64) string { return strconv.FormatInt(n, 10) }},
		func(p *Policy) *int64 { return &p.MemoryPages }),
	{Field{"fuel", true}, func(p *Policy, _ string, value any) error { return p.Fuel.set(value) },
		func(p *Policy) string {
			return fmt.Sprintf("{call = %d, record = %d, time = %q}", p.Fuel.Call, p.Fuel.Record, p.Fuel.Time)
		}},
	by("config", true, kind[map[string]string]{asSettings, settingsTOML}, func(p *Policy) *map[string]string { return &p.Config }),
}}

var roots = tableOf[Root]{"root", func(c *Config) *[]Root { return &c.Roots },
	Root{Capacity: defaultCapacity, Route: RouteAuto}, []tableKey[Root]{
		by("path", false, text, func(r *Root) *string { return &r.Path }),
		by("level", false, whole, func(r *Root) *int { return &r.Level }),
		{Field{"write", false}, (*Root).setWrite,
			func(r *Root) string { return quote(cmp.Or(r.Write, WriteBack)) }},
		by("shared", false, onOff, func(r *Root) *bool { return &r.Shared }),
		by("require_mount", false, onOff, func(r *Root) *bool { return &r.RequireMount }),
		by("route", false, text, func(r *Root) *string { return &r.Route }),
		by("endpoint", false, textIfAny, func(r *Root) *string { return &r.Endpoint }),
		by("region", false, textIfAny, func(r *Root) *string { return &r.Region }),
		by("path_style", false, ifOn, func(r *Root) *bool { return &r.PathStyle }),
		by("ca_file", false, textIfAny, func(r *Root) *string { return &r.CAFile }),
		by("prices", false, kind[[]float64]{asList("numbers", asNumber), numbers[float64]}, func(r *Root) *[]float64 { return &r.Prices }),
		{Field{"capacity", true}, (*Root).setCapacity, func(r *Root) string { return sizeTOML(r.Capacity) }},
		by("evict", true, text, func(r *Root) *string { return &r.Evict }),
		by("min_free", true, amount, func(r *Root) *Amount { return &r.MinFree }),
		{Field{"daily_writes", true}, (*Root).setDailyWrites, func(r *Root) string { return sizeTOML(r.DailyWrites) }},
	}}

var tenants = tableOf[Tenant]{"tenant", func(c *Config) *[]Tenant { return &c.Tenants }, Tenant{}, []tableKey[Tenant]{
	{Field{"id", true}, (*Tenant).setID, func(t *Tenant) string { return quote(t.ID()) }},
	by("quota", true, amount, func(t *Tenant) *Amount { return &t.Quota }),
	by("uids", true, kind[[]uint32]{asIDs, numbers[uint32]}, func(t *Tenant) *[]uint32 { return &t.UIDs }),
	by("private", true, ifOn, func(t *Tenant) *bool { return &t.Private }),
	by("sessions", true, whole, func(t *Tenant) *int { return &t.Sessions }),
}}

var expiries = tableOf[Expiry]{"expiry", func(c *Config) *[]Expiry { return &c.Expiries }, Expiry{}, []tableKey[Expiry]{
	by("model", false, text, func(e *Expiry) *string { return &e.Model }),
	by("ttl", false, kind[time.Duration]{asSpan, func(d time.Duration) string { return quote(d.String()) }},
		func(e *Expiry) *time.Duration { return &e.TTL }),
}}

var compressions = tableOf[Compression]{"compression", func(c *Config) *[]Compression { return &c.Compressions }, Compression{},
	[]tableKey[Compression]{
		by("namespaces", false, texts, func(m *Compression) *[]string { return &m.Namespaces }),
		by("mode", false, text, func(m *Compression) *string { return &m.Mode }),
	}}

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
			at := t.at(i) + "." + key
			if err := t.set(&list[i], key, element[key]); err != nil {
				r.fail(at, err)
				continue
			}
			r.into.Origins[at] = r.origin(at)
		}
		r.into.Origins[t.at(i)] = r.origin(t.at(i))
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

func numbers[N int | uint32 | float64](list []N) string {
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

func sizeTOML(n int64) string { return sizeValue(FormatSize(n)) }

func sizeValue(text string) string {
	if strings.Trim(text, "0123456789") == "" {
		return text
	}
	return quote(text)
}
