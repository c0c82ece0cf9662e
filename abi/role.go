package abi

import "fmt"

// Role is a decision that a module can take over.
type Role uint8

const (
	RoleEvict  Role = iota // which entries of a root go
	RoleAdmit              // which entries are stored at all
	RolePlace              // which path and root a piece gets
	RoleLayout             // how a payload's page bytes are ordered
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

// Exports are the functions that a module with this role must have, all of them.
func (r Role) Exports() []string { return roleExports[r] }
