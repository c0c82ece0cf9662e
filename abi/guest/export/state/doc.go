// Package state exports kv_save and kv_load. Import it for its side effect in a module with a policy that is a
// [guest.Saver].
package state
