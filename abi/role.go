package abi

import "fmt"

// Role is a decision that a module can take over.
type Role uint8

const (
	RoleEvict  Role = iota // decides which entries of a root are evicted
	RoleAdmit              // decides which entries are stored at all
	RolePlace              // decides about the path and the root of a piece
	RoleLayout             // decides about the order of a payload's page bytes
	Roles
)

var roleNames = [Roles]string{"evict", "admit", "place", "layout"}

func (r Role) String() string {
	if r < Roles {
		return roleNames[r]
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// ParseRole is the inverse of String.
func ParseRole(s string) (Role, error) {
	for r, name := range roleNames {
		if s == name {
			return Role(r), nil
		}
	}
	return 0, fmt.Errorf("abi: unknown role %q (evict, admit, place, layout)", s)
}

var roleExports = [Roles][]string{
	RoleEvict:  {ExportEvents, ExportStep},
	RoleAdmit:  {ExportAdmit},
	RolePlace:  {ExportPlace},
	RoleLayout: {ExportLayout},
}

// Exports returns the functions that a module with this role must export.
func (r Role) Exports() []string { return roleExports[r] }
