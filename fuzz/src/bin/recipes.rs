#![no_main]
//! `config::load_text`: a recipe that is accepted says the same when it is written out.

use std::path::Path;

use guildhall::config::load_text;

guildhall_fuzz::target!(|input| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let place = Path::new("recipe.toml");
    if let Ok(loaded) = load_text(place, text.to_owned()) {
        let again = load_text(place, loaded.config.to_toml()).expect("what was written is accepted");
        assert_eq!(again.config, loaded.config);
    }
});
