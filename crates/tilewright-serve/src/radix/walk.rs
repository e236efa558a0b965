//! From the root down as far as some tokens go, and the split of an edge where they leave it.
//!
//! Invariant: a split keeps the lower node in its slot, so every id that was handed out still names the deepest
//! node of its path; the new upper node has nobody's id yet, hence no lock of its own.

use std::{collections::HashMap, mem};

use super::{ROOT, RadixTree, node::Node};
use crate::pages::PageId;

/// Where tokens leave the tree.
pub(super) struct Reached {
    /// The tree's pages for the tokens so far.
    pub(super) pages: Vec<PageId>,
    /// The last node on the way whose edge shares at least a page with the tokens; or the root.
    node: usize,
    /// How many pages of that node's edge are shared: all of them, or the tokens leave inside the edge.
    shared: usize,
}

impl RadixTree {
    /// Follows `tokens` down the tree, by whole pages, and changes nothing.
    pub(super) fn walk(&self, tokens: &[u32]) -> Reached {
        let mut reached = Reached { pages: Vec::new(), node: ROOT, shared: 0 };
        let mut rest = tokens;
        while let Some(first_page) = rest.get(..self.page_size)
            && let Some(&child) = self.nodes[reached.node].children.get(first_page)
        {
            let edge = &self.nodes[child];
            let pairs = edge.tokens.chunks_exact(self.page_size).zip(rest.chunks_exact(self.page_size));
            let shared = pairs.take_while(|(ours, theirs)| ours == theirs).count();
            reached.pages.extend_from_slice(&edge.pages[..shared]);
            (reached.node, reached.shared) = (child, shared);
            if shared < edge.pages.len() {
                break;
            }
            rest = &rest[edge.tokens.len()..];
        }
        reached
    }

    /// The node at which a walk ended, made by a split if need be, with the access time of its path renewed.
    pub(super) fn settle(&mut self, reached: &Reached) -> usize {
        let inside = reached.shared < self.nodes[reached.node].pages.len();
        let node = if inside { self.split(reached.node, reached.shared) } else { reached.node };
        self.renew(node);
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

    /// Moves the clock on and makes the path from `node` to the root the most recently used.
    fn renew(&mut self, node: usize) {
        let now = self.nodes[ROOT].last_access + 1;
        self.retract(node);
        let mut at = Some(node);
        while let Some(index) = at {
            self.nodes[index].last_access = now;
            at = self.nodes[index].parent;
        }
        self.propose(node);
    }
}
