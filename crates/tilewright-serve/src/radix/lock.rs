//! Locks: protect the prefix of a running request from eviction.
//!
//! Invariant: a node's path locks are its own locks plus the path locks of its children. An unlocked node therefore has no
//! locked descendant, and bottom-up eviction never reaches a locked node.

use tilewright::{Error, Result, ensure};

use super::{RadixTree, node::NodeId};

impl RadixTree {
    /// Protects `node` and its ancestors from eviction until [`unlock`](Self::unlock). Locks are counted.
    ///
    /// # Errors
    /// When the node is not, or no longer, in the tree.
    pub fn lock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.lock", node)?;
        self.remove_candidate(index);
        self.nodes[index].own_locks += 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            if node.path_locks == 0 {
                self.num_evictable -= node.pages.len();
            }
            node.path_locks += 1;
            at = node.parent;
        }
        Ok(())
    }

    /// Releases one [`lock`](Self::lock) of exactly this node. The access time is unchanged.
    ///
    /// # Errors
    /// When the node is not in the tree or has no lock of its own; the tree is unchanged then.
    pub fn unlock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.unlock", node)?;
        ensure!(self.nodes[index].own_locks > 0, "radix.unlock", "{node} is not locked");
        self.nodes[index].own_locks -= 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            node.path_locks -= 1;
            if node.path_locks == 0 {
                self.num_evictable += node.pages.len();
            }
            at = node.parent;
        }
        self.add_candidate(index);
        Ok(())
    }

    /// The slot of a node id.
    fn find(&self, operator: &'static str, node: NodeId) -> Result<usize> {
        let missing = || Error::new(operator, format!("{node} is not, or no longer, in the tree"));
        self.nodes.find(node).ok_or_else(missing)
    }
}
