// Package budget says who holds how much of what a host has a bounded amount of: memory, file descriptors, room for stores
// that wait.
//
// Half of a budget is set aside: each holder has an equal part of it, whatever the others hold. The other half can be borrowed. A
// tenant may hold at most as much of it as it leaves free, and a holder at most as much of its tenant's part as that leaves
// free. So one tenant alone borrows at most half, two of them a third each, and there is always something left for the next
// one. Nothing is taken away from a holder: one that has more than its share gets no more until it has given some back.
//
// Where what holders need comes in pieces that may be larger than a share (Config.First), a holder's first piece may exceed it.
// Then nothing is kept for those that come later.
//
// [Sessions] are the budgets that sessions share, and a [Session] is what one of them holds of each. Clients name the sizes of
// messages and tables, so all that they make the host hold is estimated here.
package budget
