//! Nodes of the radix tree, their ids, and the generational slab that holds them.
//!
//! Invariants: a [`NodeId`] identifies one token path forever. The id becomes stale when a page of that path leaves the
//! tree, and stays stale even if the same tokens are inserted again. Each slot is either occupied or exactly once on the vacant list. A slot's generation grows when its node is
//! removed, so a stale [`NodeId`] never resolves to the slot's next node.

use crate::pages::PageId;
use std::{
    collections::HashMap,
    fmt,
    ops::{Index, IndexMut},
};
use tilewright::{Result, ensure};

#[derive(Debug, Default)]
pub(super) struct Slab {
    slots: Vec<Slot>,
    vacant: Vec<usize>,
}

#[derive(Debug, Default)]
struct Slot {
    /// 64 bits, because the slot on top of the vacant list is reused most often and must not wrap.
    generation: u64,
    node: Option<Node>,
}

impl Slab {
    /// Stores a node in a vacant or new slot and returns its index.
    pub(super) fn add(&mut self, node: Node) -> usize {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        self.slots[index].node = Some(node);
        index
    }

    /// Removes the node; its ids become stale.
    pub(super) fn remove(&mut self, index: usize) -> Node {
        let slot = &mut self.slots[index];
        let node = slot.node.take().expect("only a node of the tree is removed");
        slot.generation += 1;
        self.vacant.push(index);
        node
    }

    /// The id of the node in an occupied slot.
    pub(super) fn id(&self, index: usize) -> NodeId {
        NodeId { index, generation: self.slots[index].generation }
    }

    /// The index of a node; `None` for a stale id.
    pub(super) fn find(&self, id: NodeId) -> Option<usize> {
        let slot = self.slots.get(id.index)?;
        (slot.generation == id.generation && slot.node.is_some()).then_some(id.index)
    }

    /// The node in a slot, if the slot exists and is occupied.
    pub(super) fn get(&self, index: usize) -> Option<&Node> {
        self.slots.get(index)?.node.as_ref()
    }

    pub(super) fn num_nodes(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Checks the module's invariant; errors name `operator`.
    pub(super) fn check(&self, operator: &'static str) -> Result<()> {
        let mut listed = vec![false; self.slots.len()];
        for &index in &self.vacant {
            let vacant = self.slots.get(index).is_some_and(|slot| slot.node.is_none());
            ensure!(vacant, operator, "the vacant list holds slot {index}, which is not vacant");
            ensure!(!listed[index], operator, "the vacant list holds slot {index} twice");
            listed[index] = true;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let lost = slot.node.is_none() && !listed[index];
            ensure!(!lost, operator, "vacant slot {index} is not in the vacant list");
        }
        Ok(())
    }
}

impl Index<usize> for Slab {
    type Output = Node;

    fn index(&self, index: usize) -> &Node {
        self.get(index).expect("links inside the tree lead to nodes")
    }
}

impl IndexMut<usize> for Slab {
    fn index_mut(&mut self, index: usize) -> &mut Node {
        self.slots[index].node.as_mut().expect("links inside the tree lead to nodes")
    }
}

/// The id of a node: its slot and the slot's generation. Valid only in the tree that issued it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId {
    pub(super) index: usize,
    pub(super) generation: u64,
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.index)
    }
}

/// A node with the edge that leads to it: a run of full pages.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// `None` only for the root.
    pub(super) parent: Option<usize>,
    /// Keyed by the tokens of the child's first page; children may share a first token.
    pub(super) children: HashMap<Box<[u32]>, usize>,
    /// `[pages.len() * page_size]`
    pub(super) tokens: Vec<u32>,
    /// `[num_pages of the edge]`, not empty except for the root.
    pub(super) pages: Vec<PageId>,
    /// Locks of exactly this node.
    pub(super) own_locks: usize,
    /// Locks of this node or a descendant: these protect its pages.
    pub(super) path_locks: usize,
    /// Time of the last match or insertion; never later than the parent's.
    pub(super) last_access: u64,
}

impl Node {
    /// Whether the node is evictable: an unlocked leaf and not the root.
    pub(super) fn is_candidate(&self) -> bool {
        self.parent.is_some() && self.children.is_empty() && self.path_locks == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_after(damage: impl Fn(&mut Slab)) -> String {
        let mut slab = Slab::default();
        for _ in 0..3 {
            slab.add(Node::default());
        }
        slab.remove(1);
        slab.check("slab").unwrap();
        damage(&mut slab);
        slab.check("slab").unwrap_err().message().to_owned()
    }

    #[test]
    fn a_reused_slot_rejects_the_old_id() {
        let mut slab = Slab::default();
        let old = slab.add(Node::default());
        let old = slab.id(old);
        slab.remove(old.index);
        assert_eq!(slab.find(old), None);
        let new = slab.add(Node::default());
        assert_eq!((new, slab.find(old)), (old.index, None));
        assert_eq!(slab.find(slab.id(new)), Some(new));
    }

    #[test]
    fn check_finds_every_damage() {
        assert_eq!(error_after(|s| s.vacant.push(2)), "the vacant list holds slot 2, which is not vacant");
        assert_eq!(error_after(|s| s.vacant.push(9)), "the vacant list holds slot 9, which is not vacant");
        assert_eq!(error_after(|s| s.vacant.push(1)), "the vacant list holds slot 1 twice");
        assert_eq!(error_after(|s| s.vacant.clear()), "vacant slot 1 is not in the vacant list");
    }
}
