//! Prefix walk from the root, and splits of edges.
//!
//! Invariant: a split keeps the lower node in its slot, so issued ids still identify the deepest node of their path. The
//! new upper node has no issued id, hence no lock of its own.

use super::{ROOT, RadixTree, slab::Node};
use crate::pages::PageId;
use std::{collections::HashMap, mem};

/// The end of a prefix walk.
pub(super) struct WalkEnd {
    /// The tree's pages of the matched tokens.
    pub(super) pages: Vec<PageId>,
    /// The last node whose edge shares at least one page with the tokens, or the root.
    node: usize,
    /// Shared pages of that node's edge; fewer than all if the walk ended inside the edge.
    shared: usize,
}

impl RadixTree {
    /// Follows `tokens` down the tree in full pages, without modification.
    pub(super) fn walk(&self, tokens: &[u32]) -> WalkEnd {
        let mut end = WalkEnd { pages: Vec::new(), node: ROOT, shared: 0 };
        let mut rest = tokens;
        while let Some(first_page) = rest.get(..self.page_size)
            && let Some(&child) = self.nodes[end.node].children.get(first_page)
        {
            let edge = &self.nodes[child];
            let pairs = edge.tokens.chunks_exact(self.page_size).zip(rest.chunks_exact(self.page_size));
            let shared = pairs.take_while(|(cached, passed)| cached == passed).count();
            end.pages.extend_from_slice(&edge.pages[..shared]);
            (end.node, end.shared) = (child, shared);
            if shared < edge.pages.len() {
                break;
            }
            rest = &rest[edge.tokens.len()..];
        }
        end
    }

    /// The node at the end of a walk, created by a split if needed; updates the access time of its path.
    pub(super) fn ensure_node(&mut self, end: &WalkEnd) -> usize {
        let inside = end.shared < self.nodes[end.node].pages.len();
        let node = if inside { self.split(end.node, end.shared) } else { end.node };
        self.touch(node);
        node
    }

    /// Cuts the edge of `lower` after its first `num_pages` pages and returns the new node above the cut.
    pub(super) fn split(&mut self, lower: usize, num_pages: usize) -> usize {
        let at = num_pages * self.page_size;
        let node = &mut self.nodes[lower];
        let parent = node.parent.expect("the root has no edge to cut");
        let tail = node.tokens.split_off(at);
        let tail_pages = node.pages.split_off(num_pages);
        let head = Node {
            parent: Some(parent),
            children: HashMap::from([(tail[..self.page_size].into(), lower)]),
            tokens: mem::replace(&mut node.tokens, tail),
            pages: mem::replace(&mut node.pages, tail_pages),
            own_locks: 0,
            path_locks: node.path_locks,
            last_access: node.last_access,
        };
        let first_page = head.tokens[..self.page_size].into();
        let upper = self.nodes.add(head);
        self.nodes[lower].parent = Some(upper);
        self.nodes[parent].children.insert(first_page, upper);
        upper
    }

    /// Advances the clock and marks the path from `node` to the root as most recently used.
    fn touch(&mut self, node: usize) {
        let now = self.nodes[ROOT].last_access + 1;
        self.remove_candidate(node);
        let mut at = Some(node);
        while let Some(index) = at {
            self.nodes[index].last_access = now;
            at = self.nodes[index].parent;
        }
        self.add_candidate(node);
    }
}
