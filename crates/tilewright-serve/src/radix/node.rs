//! A node of the radix tree, and the name under which callers know it.
//!
//! Invariant: a [`NodeId`] names one token path for ever. When that path is no longer wholly in the tree the id
//! is stale and stays so, even if the same tokens come back.

use std::{collections::HashMap, fmt};

use crate::pages::PageId;

/// The name of a node: its slot, and which of the slot's successive nodes is meant.
///
/// Ids are of one tree and mean nothing to another.
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

/// A node together with the edge that leads to it: a run of whole pages.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// `None` for the root alone.
    pub(super) parent: Option<usize>,
    /// By the tokens of the child's first page: children may well share a first token.
    pub(super) children: HashMap<Box<[u32]>, usize>,
    /// `[pages.len() * page_size]`
    pub(super) tokens: Vec<u32>,
    /// `[num_pages of the edge]`, not empty except for the root.
    pub(super) pages: Vec<PageId>,
    /// Locks that name this very node.
    pub(super) own_locks: usize,
    /// Locks that name this node or one below it: those that keep its pages in the tree.
    pub(super) path_locks: usize,
    /// When its pages were last matched or inserted; never later than the parent's.
    pub(super) last_access: u64,
}

impl Node {
    /// Whether eviction may take this node now: a leaf, unlocked, and not the root.
    pub(super) fn is_candidate(&self) -> bool {
        self.parent.is_some() && self.children.is_empty() && self.path_locks == 0
    }
}
