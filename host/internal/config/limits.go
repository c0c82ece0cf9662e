package config

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Amount is a number of bytes, or a part of something that the key names.
type Amount struct {
	Bytes int64
	Part  float64 // 0 to 1; 0 means that Bytes applies
}

// parseAmount reads a size, or a percentage such as "5%".
func parseAmount(text string) (Amount, error) {
	number, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	if !percent {
		n, err := ParseSize(text)
		return Amount{Bytes: n}, err
	}
	part, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || !(part >= 0 && part <= 100) {
		return Amount{}, fmt.Errorf("%w: %q is not a percentage from 0%% to 100%%", ErrValue, text)
	}
	return Amount{Part: part / 100}, nil
}

func (a Amount) String() string {
	if a.Part > 0 {
		return strconv.FormatFloat(a.Part*100, 'g', -1, 64) + "%"
	}
	return FormatSize(a.Bytes)
}

func (a Amount) toml() string { return sizeTOML(a.String()) }

func (a Amount) zero() bool { return a == Amount{} }

func (a *Amount) set(path string, from any) (err error) {
	switch v := from.(type) {
	case int64:
		*a = Amount{Bytes: v}
	case string:
		*a, err = parseAmount(v)
	default:
		return fmt.Errorf("%w: %s is %s, want bytes, or text such as \"100GiB\" or \"5%%\"", ErrValue, path, typeName(from))
	}
	return inKey(path, err)
}

// Tenant is a rule that applies to each tenant of a range.
type Tenant struct {
	TenantIDs `toml:"id"`
	Quota     Amount   `toml:"quota"`                           // a percentage refers to the capacity of each root
	UIDs      []uint32 `toml:"uids,omitempty" max:"4294967294"` // users that may act for the tenant; nil means no rule
	Private   bool     `toml:"private,omitempty"`               // the tenant sees its own entries only, and no other tenant sees them
	Sessions  int      `toml:"sessions" max:"2147483648"`       // most sessions; 0 means no rule
}

// TenantIDs is a range of tenants.
type TenantIDs struct{ First, Last uint32 }

// IDs parses a list of user or group numbers separated by commas.
func IDs(text string) (list []uint32, err error) {
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil || n == 1<<32-1 {
			return nil, fmt.Errorf("%w: %q is not the number of a user or group", ErrValue, part)
		}
		list = append(list, uint32(n))
	}
	return list, nil
}

const allTenants = "*"

func parseTenants(text string) (first, last uint32, err error) {
	if text == allTenants {
		return 0, 1<<32 - 1, nil
	}
	from, to, isRange := strings.Cut(text, "-")
	a, err := strconv.ParseUint(from, 10, 32)
	b := a
	if err == nil && isRange {
		b, err = strconv.ParseUint(to, 10, 32)
	}
	if err != nil || b < a {
		return 0, 0, fmt.Errorf("%w: tenant.id %q: want a number such as \"7\", a range such as \"3-9\", or \"*\"",
			ErrValue, text)
	}
	return uint32(a), uint32(b), nil
}

// ID returns the range as it is written in the file.
func (t TenantIDs) ID() string {
	switch {
	case t.First == 0 && t.Last == 1<<32-1:
		return allTenants
	case t.First == t.Last:
		return strconv.FormatUint(uint64(t.First), 10)
	}
	return fmt.Sprintf("%d-%d", t.First, t.Last)
}

func (t *TenantIDs) set(path string, from any) (err error) {
	switch v := from.(type) {
	case int64:
		t.First, t.Last, err = parseTenants(strconv.FormatInt(v, 10))
	case string:
		t.First, t.Last, err = parseTenants(v)
	default:
		err = fmt.Errorf("%w: %s is %s, want text", ErrValue, path, typeName(from))
	}
	return err
}

func (t TenantIDs) toml() string { return quote(t.ID()) }

// Expiry is the time to live of entries of some models.
type Expiry struct {
	Model string        `toml:"model"` // pattern: see [path.Match]
	TTL   time.Duration `toml:"ttl"`
}

func (c *Config) validateLimits(bad func(wrong bool, path, format string, args ...any)) {
	for path, text := range map[string]string{"socket_users": c.SocketUsers, "socket_groups": c.SocketGroups} {
		if _, err := IDs(text); err != nil {
			bad(true, path, "%v: want numbers such as \"1001,1002\"", err)
		}
	}
	for i, t := range c.Tenants {
		at := "tenant[" + strconv.Itoa(i) + "]"
		rules := t.UIDs != nil || t.Private || t.Sessions > 0
		bad(t.Quota.zero() && !rules || t.Quota.Bytes < 0, at+".quota",
			"tenants %s have none, nor another rule: want bytes, or a part of each root such as \"20%%\"", t.ID())
		if j := slices.IndexFunc(c.Tenants[:i], func(o Tenant) bool {
			return o.First <= t.First && t.Last <= o.Last && !o.Quota.zero() && !t.Quota.zero()
		}); j >= 0 {
			bad(true, at+".id", "%s has its quota from the entry of %s before it", t.ID(), c.Tenants[j].ID())
		}
	}
	for i, e := range c.Expiries {
		at := "expiry[" + strconv.Itoa(i) + "]"
		if _, err := path.Match(e.Model, ""); err != nil || e.Model == "" {
			bad(true, at+".model", "%q: want a pattern of model names such as \"meta-llama/*\"", e.Model)
		}
		bad(e.TTL <= 0, at+".ttl", "%s: want a duration such as \"24h\"", e.TTL)
	}
}
