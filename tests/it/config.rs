use guildhall as _;
