//! Nodes of the radix tree and their ids.
//!
//! Invariant: a [`NodeId`] identifies one token path forever. The id becomes stale when a page of that path leaves the
//! tree, and stays stale even if the same tokens are inserted again.

use std::{collections::HashMap, fmt};

use crate::pages::PageId;

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
